"""Films: where a model looks in each frame, on one color scale."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.batch.films.frames import Film as Film, Frame as Frame
    from visattn.batch.films.mapping import Looks as Looks
    from visattn.batch.films.video import Made as Made, explain_video as explain_video, write_film as write_film
    from visattn.batch.films.walking import Walk as Walk
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".video": ["Made", "explain_video", "write_film"],
            ".mapping": ["Looks"],
            ".frames": ["Film", "Frame"],
            ".walking": ["Walk"],
        },
    )
