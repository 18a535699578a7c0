"""Answer questions with a trained model: encode texts, score pairs, search the catalogue."""
