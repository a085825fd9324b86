"""The benchmark: what a hand-over takes, beside limits of the same machine measured in the same run.

`workloads` says what is handed over, `systems` are those who do it (this connector, and the limits), `sides`
are the stages' processes, `line` drives them, `schedule` interleaves, `figures` reckons, `report` prints.
"""
