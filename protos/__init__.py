"""What both sides share on the wire: messages, codec, identities."""
