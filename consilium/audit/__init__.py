"""Audits: what an attacker can find out from what training releases. A pass proves nothing; a failure is a fault."""
