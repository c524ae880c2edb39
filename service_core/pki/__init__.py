"""Identities: keys, certificates, names, the signed roster, invitations, offline signing."""
