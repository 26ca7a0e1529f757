"""Weight sync: moves weights from the trainer to the engines and verifies them."""
