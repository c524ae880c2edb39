"""Tests lie where the modules lie that they test; `support` is what they share, `contract` what every method and port owes."""
