"""Tasks: questions in local files whose answers are scored by their likelihood, and how text becomes what is scored.

`read_tasks` reads the files, `encoded` makes tokens of them, `gregale.programs.run.scoring.Scorer` asks a model, and
`Task.figures` makes figures of its scores. `SlidingWindows` cuts documents for the same scorer.
"""
