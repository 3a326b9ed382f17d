"""What happens when numbers go wrong, or layers are not used as their modules say."""
