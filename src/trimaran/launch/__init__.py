"""From a configuration to running processes: plan, handshake, engines, supervisor."""
