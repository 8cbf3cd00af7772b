"""Small hosts of ours that keep the calling contracts of real ones, and what their tests share."""
