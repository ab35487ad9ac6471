"""From records of a trained layer to a fitted predictor."""
