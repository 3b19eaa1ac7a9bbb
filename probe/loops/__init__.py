"""The watch inside other people's training loops."""
