"""What a plan looks like: one self-contained page, and the same figures as pictures. Computes nothing of its own."""
