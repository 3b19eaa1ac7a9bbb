"""What moves while a model trains, whether real steps follow the law, and what freezing costs."""
