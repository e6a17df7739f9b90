"""Fused operations under one interface: native (C++ on the CPU) or plain torch (reference)."""
