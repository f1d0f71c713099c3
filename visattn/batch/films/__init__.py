"""Films: where a model looks in each frame, on one color scale."""

from visattn.batch.films.drawing import Made, explain_video, write_film
from visattn.batch.films.mapping import Looks
from visattn.batch.films.reading import Film, Frame

__all__ = ["Film", "Frame", "Looks", "Made", "explain_video", "write_film"]
