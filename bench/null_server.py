"""Our server with the null model: python bench/null_server.py PORT [STEP_MS]

What remains is the cost of serving. A step takes STEP_MS, like on a device: it is launched before
the result of the step before it is read.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.models import VOCABULARY, NullLoaded, write_tokenizer
from unspool.lm import LanguageModel
from unspool.server.app import create_app
from unspool.server.http import server
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.text.tokenizer.tokenizer import Tokenizer

if __name__ == "__main__":
    port, step_ms = int(sys.argv[1]), float((*sys.argv, "0")[2])
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        tokenizer = Tokenizer.from_file(folder)
    settings = ServerSettings(port=port, max_running=1024, max_queued=1024)
    loaded: Any = NullLoaded(step_ms / 1000)
    entry = ModelEntry("null", lambda: LanguageModel(loaded, tokenizer), 1)
    app, _ = create_app(settings, ModelRegistry([entry], model_memory=1 << 30))
    bound = bind_socket(settings)
    server.run(app, settings, bound, on_stopping=lambda: None, on_started=lambda address: True)
