"""What a thousand sessions, uploads beside them and strangers cost a lead who asks."""
