"""Backends. `contract` says what each must do, `registry` finds one by URL; no driver imports another."""
