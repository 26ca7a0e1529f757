"""A whole training pipeline, written by hand: what `roll train examples/tiny.yaml` does, without the run folder."""

import asyncio

import roll


async def main() -> None:
    config = roll.load_config("examples/tiny.yaml", ["train.steps=10"])
    tasks, judge = roll.check(config)
    algorithm = roll.make_algorithm(config)

    async with roll.start_roles(config, judge) as roles:
        scheduler = roll.make_scheduler(config, tasks, roles, roll.Lifecycle(None), roll.RLVRState())
        await roll.publish(roles.actor, roles.engines, version=0)

        for step in range(config.train.steps):
            rollout = await scheduler.next_rollout()  # groups: generated, judged, filtered
            if rollout.batch is not None:
                batch = algorithm.credit(rollout.batch)  # rewards become advantages
                stats = await roles.actor.call(roll.TrainWorker.update, batch, algorithm.loss, step)
                reward = sum(sample.reward for sample in rollout.samples) / len(rollout.samples)
                print(f"step {step + 1}: reward {reward:.3f}, {stats.tokens} tokens in {stats.rows} rows")
            await roll.publish(roles.actor, roles.engines, version=step + 1)
            scheduler.commit(rollout, version=step + 1)


asyncio.run(main())
