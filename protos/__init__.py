"""What both services share: messages and their codec, identities, TLS, files, and what command lines print with."""
