"""Backends. `contract` says what each must do: its calls are in `operations`, their values in `records`, and `validation` checks
both. `registry` finds a driver by URL; no driver imports another."""
