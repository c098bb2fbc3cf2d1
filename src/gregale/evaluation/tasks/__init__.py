"""Tasks: questions in local files whose answers are scored by their likelihood, and how text becomes scored tokens.

`read_tasks` reads the files and `encoded` turns them into tokens. `gregale.programs.runtime.scoring.Scorer` asks a
model, and `Task.figures` computes metrics of its scores. `SlidingWindows` cuts documents for the same scorer.
"""
