"""Scored tasks and the bigram model that evaluations compare with."""
