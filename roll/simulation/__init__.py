"""Models of everything around the rollout scheduler, on a virtual clock: engines, graders, environments, workloads; and
what a scheduler is measured against: a barrier and a lower bound."""
