"""Backends. `contract` says what each must do: its calls are in `operations`, their checks in `dispatch`, their values in
`records`. `registry` finds a driver by URL; no driver imports another."""
