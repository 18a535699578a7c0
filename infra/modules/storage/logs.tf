resource "aws_cloudwatch_log_group" "jobs" {
  #checkov:skip=CKV_AWS_338: how long is the operator's to say (log_retention_days); what became of a cycle is kept in the workspace
  name              = "/${var.name}/jobs"
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.this.arn

  depends_on = [aws_kms_key_policy.this] # CloudWatch tries the key at once
}
