"""Commands for who keeps the service running: `doctor`, `health`, `backup`, `restore`, and `log`, the audit log."""
