"""The hospital's append-only budget ledger."""
