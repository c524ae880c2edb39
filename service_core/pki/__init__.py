"""Who is who: keys, certificates, names, the signed roster, invitations, signing by hand."""
