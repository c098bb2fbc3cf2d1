"""Tasks: questions in local files whose answers are scored by their likelihood, and their conversion to scored tokens.

`read_tasks` reads the files and `encoded` turns them into tokens. `gregale.programs.runtime.scoring.Scorer` computes
scores with a model, and `Task.metrics` computes metrics from them. `SlidingWindows` cuts documents for the same scorer.
"""
