"""Experiments: the base and a change are trained and measured, for verdicts and a ledger."""
