"""Audits: what an attacker can find out from what training releases. A pass proves nothing; a failure is a fault.

A coordinator that lies (`hostile`, `manifests`), planted records (`canaries`), what training gives away (`attacks`),
and one step against what it is charged (`step_checks`); `runner` runs them, `epsilon_bounds` says what they refute.
"""
