"""Bytes between processes: sockets, listeners, the private folder, the codec. No meaning."""
