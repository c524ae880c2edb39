"""The certificate authority, the service's own certificate, and the membership."""
