"""Claims of publications, and predictions for them on the machines of the publications."""
