-- People sign in to the dashboard once, with a key; their browser then holds a session instead of the key.
-- serves: 0.1.0

-- As of keys, only the hash of a session's token is kept. A session ends with its key: every look at one asks for both.
CREATE TABLE batchwright.web_session (
    digest     bytea PRIMARY KEY,
    key_id     uuid NOT NULL REFERENCES batchwright.api_key (id) ON DELETE CASCADE,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE INDEX web_session_key ON batchwright.web_session (key_id);
CREATE INDEX web_session_expired ON batchwright.web_session (expires_at);
