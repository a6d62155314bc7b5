"""Models on a server: where a function of a model runs, the jobs that carry it there, and what can go wrong on the way."""
