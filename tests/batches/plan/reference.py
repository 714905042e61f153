"""A slow check of batch lines that uses only `json` and shares no code with the fast check."""

import json

REQUIRED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/moderations": "input",
    "/v1/responses": "input",
}
TITLES = {
    "/v1/chat/completions": "Chat Completions",
    "/v1/completions": "Completions",
    "/v1/embeddings": "Embeddings",
    "/v1/moderations": "Moderations",
    "/v1/responses": "Responses",
}


def refuse(constant):
    raise ValueError(constant)


def kind(value):
    for types, name in ((bool, "a boolean"), (str, "a string"), (dict, "an object"), (list, "an array")):
        if isinstance(value, types):
            return name
    return "a number"


def problems(data: bytes, endpoint: str):
    """(line, code, param, message) of every problem of the lines; limits of the whole file are not checked."""
    found = []
    seen = set()
    data = data.removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip() == b"":
            continue
        try:
            request = json.loads(line.decode(), parse_constant=refuse)
            if not isinstance(request, dict):
                raise ValueError(request)
            json.dumps(request, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            where = f"{half} at column {line.decode().index(half) + 1} is half of a surrogate pair"
            found.append((number, "invalid_json_line", None, f"This line is not parseable as valid JSON: {where}."))
            continue
        except ValueError:
            found.append((number, "invalid_json_line", None, "This line is not parseable as valid JSON."))
            continue
        found += [(number, *each) for each in line_problems(request, endpoint)]
        custom_id = request.get("custom_id")
        if usable(custom_id):
            if custom_id in seen:
                found.append((number, "duplicate_custom_id", "custom_id", duplicate(custom_id)))
            seen.add(custom_id)
    return found


def usable(custom_id):
    return isinstance(custom_id, str) and 0 < len(custom_id.encode()) <= 512 and "\0" not in custom_id


def duplicate(custom_id):
    return (
        f"The custom_id '{custom_id}' for this request is a duplicate of another request. "
        "The custom_id parameter must be unique for each request in a batch."
    )


def line_problems(request, endpoint):
    for name in ("custom_id", "method", "url", "body"):
        value = request.get(name)
        expected = "an object" if name == "body" else "a string"
        if value is None or (name == "custom_id" and value == ""):
            yield "missing_required_parameter", name, f"Missing required parameter: '{name}'."
        elif kind(value) != expected:
            yield wrong_type(name, expected, value)
        elif name == "custom_id" and "\0" in value:
            yield "invalid_value", name, "Invalid 'custom_id': it holds a NUL character."
        elif name == "custom_id" and not usable(value):
            size = len(value.encode())
            text = f"Expected a string with at most 512 bytes, but got a string with {size} bytes instead."
            yield "string_above_max_length", name, f"Invalid 'custom_id': string too long. {text}"
        elif name == "method" and value != "POST":
            yield "invalid_method", name, "The method provided for this request must be 'POST'."
        elif name == "url" and value != endpoint:
            yield "invalid_url", name, "The URL provided for this request does not match the batch endpoint."
    if isinstance(request.get("body"), dict):
        yield from body_problems(request["body"], endpoint)


def body_problems(body, endpoint):
    model, name = body.get("model"), REQUIRED[endpoint]
    if model is None or model == "":
        yield "invalid_request", "body.model", "Model parameter is required."
    elif not isinstance(model, str):
        yield wrong_type("body.model", "a string", model)
    elif len(model) > 176 or "\0" in model:
        text = "Model parameter must have at most 176 characters, none of them NUL."
        yield "invalid_request", "body.model", text
    value = body.get(name)
    if value is None:
        yield "invalid_request", f"body.{name}", f"{name.capitalize()} parameter is required."
    elif name == "messages" and not isinstance(value, list):
        yield wrong_type("body.messages", "an array", value)
    elif not isinstance(value, (str, list)):
        yield wrong_type(f"body.{name}", "a string or an array", value)
    if body.get("stream") not in (None, False) or (body.get("stream") == 0 and body.get("stream") is not False):
        yield (
            "streaming_unsupported",
            "body.stream",
            f"{TITLES[endpoint]}: Streaming is not supported in the Batch API.",
        )


def wrong_type(param, expected, value):
    return "invalid_type", param, f"Invalid type for '{param}': expected {expected}, but got {kind(value)} instead."
