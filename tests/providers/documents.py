"""Documents of tasks with several jobs, combined as in a run of a task."""

from batchwright.providers import state


def add_job(document, request, job, *, error=None):
    added = state.new_job(document["task_type"], document.get("provider", ""), request, job)
    if error is not None:
        added = state.fail_job(added, error)
    whole = {**document, "jobs": [*document["jobs"], added]}
    if "gcs_map" in document and job is not None:
        whole["gcs_map"] = document["gcs_map"] | state.sources(request.inputs, job)
    return whole


def replace_job(document, index, job):
    jobs = list(document["jobs"])
    jobs[index] = job
    return {**document, "jobs": jobs}
