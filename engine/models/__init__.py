"""Model families and presets: a name becomes a loaded model."""
