"""The Parallel Workers of each role: training, inference, reward, environment, critic, judge and reward model."""
