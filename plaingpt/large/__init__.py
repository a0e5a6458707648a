"""What train_large.py needs: models that are split over processes. The core imports none of it."""
