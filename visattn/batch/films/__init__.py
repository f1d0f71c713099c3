"""Films: where a model looks in each frame, on one color scale."""

from visattn.batch.films.drawing import Made, explain_video, write_film
from visattn.batch.films.mapping import Looks
from visattn.batch.films.reading import Film, Frame
from visattn.batch.films.walking import Walk

__all__ = ["Film", "Frame", "Looks", "Made", "Walk", "explain_video", "write_film"]
