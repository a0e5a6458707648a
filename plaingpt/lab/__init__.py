"""Experiments: this folder trains and scores a base and a change, for verdicts and a ledger."""
