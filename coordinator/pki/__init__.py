"""The certificate authority and the membership."""
