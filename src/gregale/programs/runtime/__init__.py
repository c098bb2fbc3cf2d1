"""What programs share: a run set up from its configuration, its batches, its evaluation, and one opened again."""
