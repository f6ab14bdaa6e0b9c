"""The target worker: rows in, target forward, hidden states into its ring."""
