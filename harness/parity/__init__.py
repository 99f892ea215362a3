"""Two traces to a verdict."""
