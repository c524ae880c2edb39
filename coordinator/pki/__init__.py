"""The certificate authority, the service's own certificate, and who is a member."""
