"""Keys, certificates, names, the signed roster, invitations, offline signing."""
