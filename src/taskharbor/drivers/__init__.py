"""Backends. `contract` says what each must do: its calls and their checks are in `operations`, their values in `records`.
`registry` finds a driver by URL; no driver imports another."""
