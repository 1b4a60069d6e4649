"""The benchmark: cases as data, providers side by side in one process, figures with their regime.

`te-ops bench` runs it; `data` has the cases, `targets` what they must show, `peers` the providers,
`measure` the clock, `report` the tables.
"""
