"""Bytes between processes: sockets, listeners, the codec. No meaning."""
