"""Models of everything around the rollout scheduler, on a virtual clock: engines, graders, environments, workloads; and
the baselines of a scheduler: a barrier and a lower bound."""
